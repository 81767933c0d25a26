"""Serves clients: sessions, training passes, adapters, reports."""
