"""Environments: what answers a policy that calls tools and speaks in turns."""
