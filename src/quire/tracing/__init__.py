"""Spans for OpenTelemetry: what they are, and how they get to a collector. Imported only where
somebody asked for them (`--otlp`)."""
