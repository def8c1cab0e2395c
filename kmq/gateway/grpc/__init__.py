"""The gRPC door of the gateway."""
