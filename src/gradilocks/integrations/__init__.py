"""Other people's tools, one file each, imported when they are used and never required."""
