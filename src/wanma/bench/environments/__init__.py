"""Python environments of commands: pinned packages, their check, and their creation on request."""
