"""lorafleet's proxy: one endpoint in front of a fleet of vLLM replicas."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("lorafleet")
except PackageNotFoundError:  # run from a checkout that is not installed
    __version__ = "0+unknown"
