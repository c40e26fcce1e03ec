"""The errors flashgen raises. Each message names the argument, the value and the remedy."""


class FlashgenError(Exception):
    """Base of every error that flashgen raises on purpose."""


class SpecError(FlashgenError, ValueError):
    """A spec, mask, score function or capture that cannot be declared as given."""


class ArgumentError(FlashgenError, ValueError):
    """An argument of a call that the kernel does not accept."""


class UnsupportedError(FlashgenError, NotImplementedError):
    """A valid spec that the chosen target, family or plan cannot run."""


class BuildError(FlashgenError, RuntimeError):
    """Source that did not compile, or a compiler or tool that is missing."""


class LaunchError(FlashgenError, RuntimeError):
    """A kernel that could not be launched, or that failed while it ran."""


class PeerError(FlashgenError, RuntimeError):
    """Another rank of a group that does not answer, which the message names."""


class FlashgenWarning(UserWarning):
    """What a user should hear of: what flashgen put right by itself, such as a damaged entry, and what takes long."""
