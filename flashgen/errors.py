"""The errors that flashgen raises. Each message names the argument, the value and the remedy."""

LIMITS_PAGE = "docs/limits.md"
"""The page of the documentation that lists what flashgen cannot do, and what to do instead."""
SEE_LIMITS = f"(see {LIMITS_PAGE})"
"""Ends the messages that refuse what is on that page."""


class FlashgenError(Exception):
    """The base class of the errors that flashgen raises on purpose."""


class SpecError(FlashgenError, ValueError):
    """Raised for a spec, mask, score function or capture that cannot be declared as given."""


class ArgumentError(FlashgenError, ValueError):
    """Raised for an argument of a call that the kernel does not accept."""


class UnsupportedError(FlashgenError, NotImplementedError):
    """Raised for a valid spec that the chosen target, family or plan cannot run. Its message names `LIMITS_PAGE`."""

    def __str__(self) -> str:
        message = super().__str__()
        return message if LIMITS_PAGE in message else f"{message} {SEE_LIMITS}"


class PlanError(UnsupportedError):
    """Raised for a plan that the spec, the target or its kernels do not take."""

    def __str__(self) -> str:
        return Exception.__str__(self)


class BuildError(FlashgenError, RuntimeError):
    """Raised if source does not compile, or a compiler or tool is missing."""


class LaunchError(FlashgenError, RuntimeError):
    """Raised if a kernel cannot be launched, or fails while it runs."""


class PeerError(FlashgenError, RuntimeError):
    """Raised if a message between ranks fails: another rank has ended, stands still, or makes other calls."""


class FlashgenWarning(UserWarning):
    """A warning about something that flashgen repaired by itself, such as a damaged cache entry, or that takes long."""
