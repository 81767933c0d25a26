"""Protobuf code generated from proto/ (never edited by hand), canonical JSON, and the roles of
members."""
