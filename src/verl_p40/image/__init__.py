"""The container image: build, inspect, push, pull, verify, through a Docker Engine."""
