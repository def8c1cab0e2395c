// The admin client of kafkajs as a program: NODE_PATH=… node kafka_admin.js PORT; each line of output is one answer.

const { ConfigResourceTypes, Kafka, logLevel } = require("kafkajs");

async function main(port) {
  const admin = new Kafka({ brokers: [`localhost:${port}`], logLevel: logLevel.NOTHING }).admin();
  const resource = { type: ConfigResourceTypes.TOPIC, name: "js" };
  await admin.connect();
  try {
    console.log("brokers", (await admin.describeCluster()).brokers.length);
    const topic = { topic: "js", numPartitions: 2, configEntries: [{ name: "retention.ms", value: "1000" }] };
    console.log("made", await admin.createTopics({ topics: [topic] }));
    console.log("again", await admin.createTopics({ topics: [topic] }));
    await admin.createPartitions({ topicPartitions: [{ topic: "js", count: 3 }] });
    console.log("partitions", (await admin.fetchTopicMetadata({ topics: ["js"] })).topics[0].partitions.length);
    await admin.alterConfigs({ resources: [{ ...resource, configEntries: [{ name: "cleanup.policy", value: "compact" }] }] });
    const { resources } = await admin.describeConfigs({ resources: [{ ...resource, configNames: ["retention.ms", "cleanup.policy"] }] });
    console.log("settings", ...resources[0].configEntries.map(({ configName, configValue }) => `${configName}=${configValue}`));
    console.log("topics", (await admin.listTopics()).includes("js"));
    await admin.deleteTopics({ topics: ["js"] });
    console.log("topics", (await admin.listTopics()).includes("js"));
  } finally {
    await admin.disconnect();
  }
}

main(process.argv[2]).catch((error) => { console.log("failed", error.name, error.message); process.exitCode = 1; });
