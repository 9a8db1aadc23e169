"""One step of ``pt214.enable()`` per module: ``apply(patches)`` does it and tells what it did."""
