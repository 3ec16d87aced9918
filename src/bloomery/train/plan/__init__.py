"""Plans of a training run: memory, disk and time, and the settings that fit a machine."""
