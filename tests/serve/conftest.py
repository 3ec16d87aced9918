"""Clients share one context of TLS: each would read all certificates, which takes longer than what it asks for."""

from functools import cache

from httpx._transports import default

vars(default)["create_ssl_context"] = cache(vars(default)["create_ssl_context"])
