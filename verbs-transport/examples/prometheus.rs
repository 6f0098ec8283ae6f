//! What Prometheus would scrape. `cargo run --example prometheus [-- --serve ADDR]`
//!
//! Two workers talk over a simulated fabric, so this needs no device. In a program of yours, only the lines about
//! the recorder and `metrics_interval` are new. Prints the text, or serves it until interrupted.

use std::{env, error::Error, net::SocketAddr, process::ExitCode, sync::Arc, time::Duration};

use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
};
use verbs_transport::{
    Config, Inbound, MessageType, SendError, SendOutcome, Worker,
    sim::{HostConfig, SimConfig, SimFabric, SimWorld},
};

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    match run().await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("prometheus: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn run() -> Result<(), Box<dyn Error>> {
    let serve: Option<SocketAddr> = match env::args().skip(1).collect::<Vec<_>>().as_slice() {
        [] => None,
        [flag, addr] if flag == "--serve" => Some(addr.parse()?),
        _ => return Err("usage: prometheus [--serve ADDR:PORT]".into()),
    };
    // Once in a program, before its workers start. The crate's `http-listener` feature serves the text by itself.
    let recorder: PrometheusHandle = PrometheusBuilder::new().install_recorder()?;

    let world = SimWorld::new(SimConfig::default());
    let (client, client_in) = start(&world, 1).await?;
    let (server, server_in) = start(&world, 2).await?;
    talk((&client, client_in), (&server, server_in)).await?;
    // One interval later all that has happened is published.
    tokio::time::sleep(2 * INTERVAL).await;
    match serve {
        None => print!("{}", recorder.render()),
        Some(addr) => answer(addr, &recorder).await?,
    }
    tokio::join!(client.shutdown(), server.shutdown());
    Ok(())
}

const INTERVAL: Duration = Duration::from_millis(100);

async fn start(world: &SimWorld, host: u8) -> Result<(Worker<SimFabric>, Inbound), Box<dyn Error>> {
    let config = Config {
        bind: ([10, 0, 0, host], 0).into(),
        // One second is often enough; here nobody wants to wait.
        metrics_interval: Some(INTERVAL),
        ..Config::default()
    };
    let worker = Worker::new(config, world.host([10, 0, 0, host], HostConfig::default()))?;
    let inbound = worker.start().await?;
    Ok((worker, inbound))
}

/// A thousand requests of three sizes, each answered.
async fn talk(
    (client, mut client_in): (&Worker<SimFabric>, Inbound),
    (server, mut server_in): (&Worker<SimFabric>, Inbound),
) -> Result<(), Box<dyn Error>> {
    let to_server = client.register(&server.address())?;
    let to_client = server.register(&client.address())?;
    let lost = Arc::new(|_header, _payload, error: SendError| eprintln!("not delivered: {error}"));
    for n in 0..1000_u32 {
        let payload = vec![0; [16, 1024, 20_000][n as usize % 3]];
        let sent = client.send(to_server, "request".into(), payload.into(), MessageType::Message, lost.clone());
        if let SendOutcome::Pending(room) = sent {
            room.await?;
        }
        let request = server_in.message.recv().await.ok_or("the server has stopped")?;
        let _ = server.send(to_client, request.header, "done".into(), MessageType::Response, lost.clone());
        client_in.response.recv().await.ok_or("the client has stopped")?;
    }
    Ok(())
}

/// As much HTTP as a scrape needs.
async fn answer(addr: SocketAddr, recorder: &PrometheusHandle) -> Result<(), Box<dyn Error>> {
    let listener = TcpListener::bind(addr).await?;
    println!("http://{}/metrics", listener.local_addr()?);
    loop {
        let (mut stream, _) = listener.accept().await?;
        let mut request = [0; 4096];
        if stream.read(&mut request).await.unwrap_or(0) == 0 {
            continue;
        }
        recorder.run_upkeep();
        let text = recorder.render();
        let head = "HTTP/1.1 200 OK\r\ncontent-type: text/plain; version=0.0.4\r\nconnection: close\r\n";
        let answer = format!("{head}content-length: {}\r\n\r\n{text}", text.len());
        // A scraper that hangs up is no fault of ours.
        let _ = stream.write_all(answer.as_bytes()).await;
    }
}
