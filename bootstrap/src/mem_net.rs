//! A [`Net`] in memory, for simulation and for tests in paused time.

use std::{
    collections::HashMap,
    io,
    net::SocketAddr,
    sync::{Arc, Mutex, PoisonError},
};

use tokio::{
    io::{DuplexStream, duplex},
    sync::mpsc,
};

use crate::net::{Net, NetListener};

/// One end of a connection in memory.
pub type MemStream = DuplexStream;

/// A network in memory: clones share it. Ports are chosen from 1 up. Connecting to an address that nobody listens at
/// is refused at once; one that was [black-holed](Self::black_hole) never answers.
#[derive(Clone, Debug, Default)]
pub struct MemNet {
    places: Arc<Mutex<HashMap<SocketAddr, Place>>>,
}

#[derive(Debug)]
enum Place {
    Listener(mpsc::UnboundedSender<(MemStream, SocketAddr)>),
    BlackHole,
}

/// The listener of a [`MemNet`].
#[derive(Debug)]
pub struct MemListener {
    addr: SocketAddr,
    inbound: mpsc::UnboundedReceiver<(MemStream, SocketAddr)>,
    net: MemNet,
}

impl MemNet {
    /// An empty network.
    pub fn new() -> Self {
        Self::default()
    }

    /// From now on dials to `addr` neither connect nor fail.
    pub fn black_hole(&self, addr: SocketAddr) {
        self.places().insert(addr, Place::BlackHole);
    }

    fn places(&self) -> std::sync::MutexGuard<'_, HashMap<SocketAddr, Place>> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Net for MemNet {
    type Stream = MemStream;
    type Listener = MemListener;

    async fn listen(&self, mut addr: SocketAddr) -> io::Result<MemListener> {
        let mut places = self.places();
        if addr.port() == 0 {
            let free = (1..=u16::MAX).find(|port| !places.contains_key(&SocketAddr::new(addr.ip(), *port)));
            addr.set_port(free.ok_or(io::ErrorKind::AddrInUse)?);
        } else if places.contains_key(&addr) {
            return Err(io::ErrorKind::AddrInUse.into());
        }
        let (sender, inbound) = mpsc::unbounded_channel();
        places.insert(addr, Place::Listener(sender));
        drop(places);
        Ok(MemListener { addr, inbound, net: self.clone() })
    }

    async fn dial(&self, addr: SocketAddr) -> io::Result<MemStream> {
        let sender = match self.places().get(&addr) {
            Some(Place::Listener(sender)) => Some(sender.clone()),
            Some(Place::BlackHole) => None,
            None => return Err(io::ErrorKind::ConnectionRefused.into()),
        };
        let Some(sender) = sender else { return std::future::pending().await };
        let (near, far) = duplex(PIPE_BYTES);
        let from = SocketAddr::new(addr.ip(), 0);
        sender.send((far, from)).map_err(|_| io::ErrorKind::ConnectionRefused)?;
        Ok(near)
    }
}

impl NetListener for MemListener {
    type Stream = MemStream;

    fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.addr)
    }

    async fn accept(&mut self) -> io::Result<(MemStream, SocketAddr)> {
        self.inbound.recv().await.ok_or_else(|| io::ErrorKind::NotConnected.into())
    }
}

impl Drop for MemListener {
    fn drop(&mut self) {
        let mut places = self.net.places();
        if matches!(places.get(&self.addr), Some(Place::Listener(_))) {
            places.remove(&self.addr);
        }
    }
}

/// Each direction of a connection.
const PIPE_BYTES: usize = 8192;
