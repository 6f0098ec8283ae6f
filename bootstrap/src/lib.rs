//! One TCP exchange that turns two addresses into two connected queue pairs.
//!
//! | module | holds |
//! |---|---|
//! | `types` | the numbers that cross the wire, and [`Offer`] |
//! | `status` | why a side refuses: [`Status`], [`Refusal`] |
//! | `wire` | frames of version 1, the only user of bincode |
//! | `address` | [`WorkerAddress`]: what discovery publishes |
//! | `exchange` | [`Exchange`]: one peer's hand-shake decisions, no I/O and no clock |
//! | `auth` | [`Secret`]: both sides prove it before a QP goes to RTR |
//! | `dial`, `listen`, `life` | the exchange over a [`Net`], under one deadline |
//! | `tcp`, `mem_net` | the real [`Net`] and one in memory |
//!
//! The bytes on the wire and the reason for each rule are in `docs/bootstrap.md`.
//!
//! A worker keeps one [`Exchange`] for each peer under that peer's lock, answers hellos as an [`Acceptor`], and calls
//! [`dial`]. `tests/crossed.rs` has a whole one in 200 lines; this is one exchange with a fixed answer:
//!
//! ```
//! use std::sync::Arc;
//!
//! use verbs_bootstrap::{
//!     AcceptError, Acceptor, Config, Generation, Gid, GidType, Incarnation, InstanceId, LifeSocket, LinkLayer, Listener,
//!     Mtu, Offer, Plane, PortIdentity, Psn, QpEndpoint, Qpn, RdAtomic, Refusal, Secret, TcpNet, dial,
//! };
//!
//! fn offer(from: u128, to: u128, qpn: u32) -> Offer {
//!     // What a worker reads from its device and from the QP that it made.
//!     let port = PortIdentity {
//!         device_guid: 1, port: 1, link_layer: LinkLayer::Ethernet, lid: 0, gid: Gid([0; 16]),
//!         gid_type: GidType::RoceV2, gid_index: 3, pkey: 0xffff, mtu: Mtu::B1024,
//!     };
//!     let qp = QpEndpoint { qpn: Qpn::new(qpn).expect("24 bits"), psn: Psn::from_random(0x8d31f0) };
//!     Offer {
//!         from: InstanceId(from), from_incarnation: Incarnation(7), to: InstanceId(to), to_incarnation: Incarnation(7),
//!         generation: Generation(1), echoed_generation: Generation(0), port, plane: Plane::Messaging, qp,
//!         rd_atomic: RdAtomic { initiator: 16, responder: 16 }, slab_bytes: 8192, window_slabs: 64,
//!         eager_max_bytes: 16 << 20, features: 0,
//!     }
//! }
//!
//! struct Worker;
//!
//! impl Acceptor for Worker {
//!     type Stream = tokio::net::TcpStream;
//!
//!     async fn on_hello(&self, hello: Offer) -> Result<Offer, Refusal> {
//!         // Ask the peer's `Exchange`, bring the QP to RTS with what `hello` says, then:
//!         Ok(offer(2, hello.from.0, 0x130))
//!     }
//!
//!     fn on_ready(&self, _hello: Offer, _reply: Offer, _life: LifeSocket<Self::Stream>) {}
//!     fn on_abandoned(&self, _hello: Offer, _reply: Offer, _why: AcceptError) {}
//! }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let config = Config { secret: Some(Secret::new(&[0x5a; 32])?), ..Config::default() };
//! let net = TcpNet::new(&config.tcp);
//! let listener = Listener::bind(&net, ([127, 0, 0, 1], 0).into(), &config, Arc::new(Worker)).await?;
//!
//! let dialed = dial(&net, listener.local_addr(), &offer(1, 2, 0x12f), &config).await?;
//! assert_eq!(dialed.reply.qp.qpn.get(), 0x130);
//! // Bring the QP to RTS with what the reply says, then tell the acceptor:
//! let _life = dialed.ready().await?;
//! # Ok(())
//! # }
//! ```

mod address;
mod auth;
mod config;
mod counters;
mod dial;
mod exchange;
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub mod fuzzing;
mod history;
mod life;
mod listen;
mod mem_net;
mod net;
mod serve;
mod status;
#[cfg(test)]
mod talk_tests;
mod tcp;
#[cfg(test)]
mod testing;
mod types;
mod wire;

pub use address::{
    AddressError, DeviceHint, EncodeAddressError, Endpoint, InvalidEndpoint, NoEndpoint, TRANSPORT_KEY, WorkerAddress,
};
pub use auth::{Secret, SecretTooShort};
pub use config::{Config, ConfigError, Keepalive, TcpConfig};
pub use dial::{DialError, Dialed, dial};
pub use exchange::{Backoff, DialFailed, DialStart, Exchange, HelloVerdict, Identity, RegisterVerdict, ReplyVerdict};
pub use life::{LifeEnd, LifeSocket};
pub use listen::{AcceptError, Acceptor, ListenError, Listener, ListenerStats};
pub use mem_net::{MemListener, MemNet, MemStream};
pub use net::{Net, NetListener};
pub use status::{Refusal, Stage, Status};
pub use tcp::{TcpNet, TcpNetListener};
pub use types::{
    Generation, Gid, GidFamily, GidType, Incarnation, InstanceId, LinkLayer, Mtu, Not24Bits, Offer, Plane,
    PortIdentity, Psn, QpEndpoint, Qpn, RdAtomic,
};
pub use wire::WireError;
