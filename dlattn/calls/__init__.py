"""Calls of functions: from tensors and options to a built plan, kept, and its results.

A function (:mod:`dlattn.flash`) says once for each kind of call what it wants, as a
:class:`~dlattn.calls.request.Request`; a :class:`~dlattn.calls.cache.CallCache` keeps the
:data:`~dlattn.calls.call.Call` that comes of it for all that look alike.
"""
