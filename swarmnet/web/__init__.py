"""Serving pages and endpoints over HTTP: the gateway, the dashboard, a node's metrics."""
