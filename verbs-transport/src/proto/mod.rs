//! The protocol, without I/O: bytes, completions and time go in, work requests and decisions come out.

pub mod assembly;
pub mod credit;
pub mod frame;
pub mod link;
pub mod pack;
pub mod receive_share;
pub mod send_queue;

#[cfg(test)]
mod tests;
