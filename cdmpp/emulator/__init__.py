"""Pipeline step emulator (SEMU)."""
