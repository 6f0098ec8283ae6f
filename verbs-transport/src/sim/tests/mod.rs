//! The simulation against the rules of verbs, each as one test; then its faults, its net and its speed.

mod bulk;
mod faults;
mod net;
mod pair;
mod rules;
mod speed;
mod windows;
