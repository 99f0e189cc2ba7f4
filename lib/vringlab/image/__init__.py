"""The one root file system that lab host and guest share."""
