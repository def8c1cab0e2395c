// Apache's own admin client as a program: java -cp … KafkaAdmin.java PORT; each line of output is one answer.

import java.util.Collection;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.Set;
import java.util.TreeSet;
import java.util.concurrent.ExecutionException;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.AlterConfigOp;
import org.apache.kafka.clients.admin.Config;
import org.apache.kafka.clients.admin.ConfigEntry;
import org.apache.kafka.clients.admin.NewPartitions;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.common.config.ConfigResource;

public class KafkaAdmin {
    public static void main(String[] arguments) throws Exception {
        Properties properties = new Properties();
        properties.put("bootstrap.servers", "localhost:" + arguments[0]);
        ConfigResource topic = new ConfigResource(ConfigResource.Type.TOPIC, "java");
        try (Admin admin = Admin.create(properties)) {
            System.out.println("nodes " + admin.describeCluster().nodes().get().size());
            NewTopic wanted = new NewTopic("java", 2, (short) 1).configs(Map.of("retention.ms", "1000"));
            admin.createTopics(List.of(wanted)).all().get();
            System.out.println("again " + failure(admin, List.of(wanted)));
            System.out.println("wrong " + failure(admin, List.of(new NewTopic("java2", 2, (short) 3))));
            admin.createPartitions(Map.of("java", NewPartitions.increaseTo(5))).all().get();
            System.out.println("partitions " + admin.describeTopics(List.of("java")).allTopicNames().get().get("java").partitions().size());
            AlterConfigOp set = new AlterConfigOp(new ConfigEntry("retention.ms", "2000"), AlterConfigOp.OpType.SET);
            AlterConfigOp add = new AlterConfigOp(new ConfigEntry("cleanup.policy", "compact"), AlterConfigOp.OpType.APPEND);
            admin.incrementalAlterConfigs(Map.of(topic, List.of(set, add))).all().get();
            Config config = admin.describeConfigs(List.of(topic)).all().get().get(topic);
            for (String name : List.of("retention.ms", "cleanup.policy", "max.message.bytes", "segment.ms")) {
                ConfigEntry entry = config.get(name);
                System.out.println(name + " " + entry.value() + " " + entry.source() + " " + entry.type() + " " + entry.isReadOnly());
            }
            System.out.println("dirs " + admin.describeLogDirs(List.of(0)).allDescriptions().get().get(0).size());
            System.out.println("topics " + new TreeSet<>(admin.listTopics().names().get()).contains("java"));
            admin.deleteTopics(Set.of("java")).all().get();
            System.out.println("topics " + admin.listTopics().names().get().contains("java"));
        }
    }

    private static String failure(Admin admin, Collection<NewTopic> topics) throws InterruptedException {
        try {
            admin.createTopics(topics).all().get();
            return "none";
        } catch (ExecutionException e) {
            return e.getCause().getClass().getSimpleName();
        }
    }
}
