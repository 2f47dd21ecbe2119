"""Bytes to events and back: frames, messages, the handshake. No I/O."""
