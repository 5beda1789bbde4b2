from hypothesis import settings

# The default deadline fails a slow example: on a busy machine that says nothing about the code.
settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")
