"""Metal sources (``.metal``) beside their bare launchers; nothing here checks arguments."""
