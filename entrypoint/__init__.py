"""The launcher: reads the machine, plans, binds, starts. Imports no torch."""
