"""Arrays in and out, and the launch: on a GPU, or on the emulator."""
