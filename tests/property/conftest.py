"""One Hypothesis profile: bounded, without deadlines, and the same on every machine."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "quire",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
settings.load_profile("quire")
