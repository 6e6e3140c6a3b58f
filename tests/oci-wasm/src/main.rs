//! `oci-wasm-client push FILE REFERENCE` and `oci-wasm-client pull REFERENCE FILE`, over plain HTTP, as nobody.

use anyhow::{Context as _, bail};
use oci_client::{
    Client,
    client::{ClientConfig, ClientProtocol},
    secrets::RegistryAuth,
};
use oci_wasm::{WasmClient, WasmConfig};

#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<()> {
    if rustls::crypto::ring::default_provider().install_default().is_err() {
        bail!("there is another provider of cryptography");
    }
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let config = ClientConfig { protocol: ClientProtocol::Http, ..ClientConfig::default() };
    let client = WasmClient::new(Client::try_from(config)?);
    let auth = RegistryAuth::Anonymous;
    match arguments.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        ["push", file, reference] => {
            let (config, layer) = WasmConfig::from_component(file, None).await?;
            client.push(&reference.parse()?, &auth, layer, config, None).await?;
        }
        ["pull", reference, file] => {
            let reference = reference.parse()?;
            // It refuses a config that is not that of a component.
            let (_, config, _) = client.pull_manifest_and_config(&reference, &auth).await?;
            let layer = client.pull(&reference, &auth).await?.layers.pop().context("there is no layer")?;
            if config.layer_digests != [layer.sha256_digest()] {
                bail!("the config names other layers: {config:?}");
            }
            std::fs::write(file, &layer.data)?;
        }
        _ => bail!("push FILE REFERENCE, or pull REFERENCE FILE"),
    }
    Ok(())
}
