"""Stores, against a real S3 server."""
