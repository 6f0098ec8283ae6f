//! The smallest program: two workers, one message, a reply. `cargo run --example hello`
//!
//! Both workers live in this process; in a real program each host has one, and the addresses (plain bytes) travel by
//! whatever means it has.

use std::{error::Error, process::ExitCode, sync::Arc};

use verbs_transport::{
    Config, Inbound, MessageType, SendError, TcpNet, Worker,
    verbs::{DeviceConfig, DeviceFabric},
};

#[tokio::main]
async fn main() -> ExitCode {
    match hello().await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("hello: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn hello() -> Result<(), Box<dyn Error>> {
    let (client, mut client_in) = start().await?;
    let (server, mut server_in) = start().await?;
    let to_server = client.register(&server.address())?;
    let to_client = server.register(&client.address())?;

    // Called once for each message that is not known to have been delivered.
    let lost = Arc::new(|_header, _payload, error: SendError| eprintln!("not delivered: {error}"));

    let _ = client.send(to_server, "greeting".into(), "hello".into(), MessageType::Message, lost.clone());
    let question = server_in.message.recv().await.ok_or("the server has stopped")?;
    println!("server got {:?} from {}", question.payload, question.peer);

    let _ = server.send(to_client, question.header, "hello to you".into(), MessageType::Response, lost);
    let answer = client_in.response.recv().await.ok_or("the client has stopped")?;
    println!("client got {:?} from {}", answer.payload, answer.peer);

    println!("over {}", client.path_reason());
    tokio::join!(client.shutdown(), server.shutdown());
    Ok(())
}

async fn start() -> Result<(Worker<DeviceFabric<TcpNet>>, Inbound), Box<dyn Error>> {
    let fabric = DeviceFabric::open(&DeviceConfig::default(), TcpNet::default())?;
    let worker = Worker::new(Config::default(), fabric)?;
    let inbound = worker.start().await?;
    Ok((worker, inbound))
}
