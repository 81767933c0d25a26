"""HTTP serving shared by the gateway, the dashboard and a node's metrics: server and middleware."""
