//! The simulation against the rules of verbs, each as one test.

mod pair;
mod rules;
