"""Settings of all tests: a busy machine is no failure, so examples of hypothesis have no deadline."""

from hypothesis import settings

settings.register_profile("bloomery", deadline=None)
settings.load_profile("bloomery")
