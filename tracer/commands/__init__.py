"""The commands, a module each: they parse, wire and print; what loads torch is imported when a command runs."""
