//! End-to-end tests: the real host and real plugins on a real control plane.
