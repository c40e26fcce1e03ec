"""What a kernel is, on one page: `flashgen report`, and the numbers behind it."""
