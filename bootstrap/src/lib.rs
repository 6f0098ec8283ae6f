//! One TCP exchange that turns two addresses into two connected queue pairs.
