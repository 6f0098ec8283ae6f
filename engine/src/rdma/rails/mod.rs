//! Several NICs at either end: how a request is cut, which pair of NICs takes a piece, and which pairs are let rest.
//! Pure: no I/O, no lock, and time is what the caller says it is.
//!
//! | module | holds |
//! |---|---|
//! | `slicing` | the pieces of a request |
//! | `choice` | NICs with what is in flight over them, what they were seen to do, and the choice among paths |
//! | `health` | pairs that fail, and how long they are left out |

pub(crate) mod choice;
pub(crate) mod health;
#[cfg_attr(not(test), expect(dead_code, reason = "operations 6 and 7 are not there yet"))]
pub(crate) mod slicing;
