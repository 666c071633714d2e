"""What can go wrong with a request, by name."""

from __future__ import annotations


class Refused(ValueError):
    """The request can never be served, or is turned away; the message says why and what would be right."""


class RequestFailed(RuntimeError):
    """The forward pass of this request raised. Other requests are not affected."""


class EngineStopped(RuntimeError):
    """The engine takes no requests: it is stopping, or has stopped."""
