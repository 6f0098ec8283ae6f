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

mod address;
mod auth;
mod config;
mod counters;
mod dial;
mod exchange;
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
    Generation, Gid, GidFamily, GidType, Incarnation, InstanceId, LinkLayer, Mtu, Not24Bits, Offer, PortIdentity, Psn,
    QpEndpoint, Qpn, RdAtomic,
};
pub use wire::WireError;
