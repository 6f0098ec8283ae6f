//! Several NICs at either end: how a request is cut, which pair of NICs takes a piece, and which pairs are let rest.
//! Pure: no I/O, no lock, and time is what the caller says it is.
//!
//! | module | holds |
//! |---|---|
//! | `slicing` | the pieces of a request |
//! | `choice` | NICs with what is in flight over them, what they were seen to do, and the choice among paths |
//! | `plan` | which pair carries which bytes: what both sides agree on |
//! | `parent` | what is due for all pairs of a request together |
//! | `health` | pairs that fail, and how long they are left out |

pub(crate) mod choice;
pub(crate) mod health;
pub(crate) mod parent;
pub(crate) mod plan;
pub(crate) mod slicing;
