"""Protobuf code generated from proto/ (never edited by hand) and the framing around it."""
