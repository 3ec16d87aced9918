"""What every part stands on: config, stages, files, errors, what a person sees."""
