"""Arrays, streams and launches, on a GPU or on the emulator."""
