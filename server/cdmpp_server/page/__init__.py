"""The page at ``GET /``: HTML, styles and scripts that this service alone serves."""
