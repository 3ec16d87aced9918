"""The base of all packages: configuration, stages, files, errors, terminal output."""
