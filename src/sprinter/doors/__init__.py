"""Doors: Sprinter's methods inside engines and tools that others keep. Each module imports its tool alone."""
