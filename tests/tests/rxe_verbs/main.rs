//! The owners of verbs objects and the fabric over them, on a real device.
//!
//! Soft-RoCE is meant, but nothing here asks for it by name. The tests change the link and addresses of the network
//! device under it, so they need root and a machine of their own: `cargo softroce test rxe_verbs`.
#![allow(missing_docs)]

mod rig;

mod connect;
mod events;
mod messages;
mod opening;
mod teardown;
mod windows;
