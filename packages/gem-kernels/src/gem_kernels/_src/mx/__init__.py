"""Casts to and from the MX formats."""
