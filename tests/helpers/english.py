"""Phrases that texts for users do without; pages, docstrings and messages are checked for them."""

from __future__ import annotations

import re

PHRASES = re.compile(
    r"\b(anew|by (it|them)sel(f|ves)|who(m|se)?ever|likewise|in the mean|without a word|in turns|"
    r"of (its|their|your|his|one's) own|that which|of which|nobody waits|taken in again)\b",
    re.IGNORECASE,
)
