//! Scenario suites.
