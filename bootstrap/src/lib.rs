//! One TCP exchange that turns two addresses into two connected queue pairs.

mod net;
mod types;

pub use net::{Net, NetListener};
pub use types::{
    Generation, Gid, GidFamily, GidType, Incarnation, InstanceId, LinkLayer, Mtu, Offer, PortIdentity, Psn, QpEndpoint,
    Qpn, RdAtomic,
};
