import java.time.Duration;
import java.util.*;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.stream.Collectors;
import org.apache.kafka.clients.consumer.*;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.StringDeserializer;

/** A member of a group by Apache's own client; what it says and is told stands in kafka_members.py. */
public class KafkaMember {
    /** An assignor that no broker knows. */
    public static class Own extends RangeAssignor {
        @Override public String name() { return "own"; }
    }

    static void say(Object... words) {
        System.out.println(Arrays.stream(words).map(String::valueOf).collect(Collectors.joining(" ")));
        System.out.flush();
    }

    static String numbers(Collection<TopicPartition> partitions) {
        return partitions.stream().map(TopicPartition::partition).sorted().map(String::valueOf).collect(Collectors.joining(" "));
    }

    public static void main(String[] args) throws Exception {
        Properties settings = new Properties();
        settings.put("bootstrap.servers", "localhost:" + args[0]);
        settings.put("group.id", args[1]);
        settings.put("key.deserializer", StringDeserializer.class.getName());
        settings.put("value.deserializer", StringDeserializer.class.getName());
        for (String word : Arrays.asList(args).subList(3, args.length)) {
            String[] parts = word.split("=", 2);
            settings.put(parts[0], parts[1].equals("own") ? List.of(Own.class) : parts[1]);
        }
        String topic = args[2];
        LinkedBlockingQueue<String[]> waiting = new LinkedBlockingQueue<>();
        Thread reading = new Thread(() -> {
            Scanner lines = new Scanner(System.in);
            while (lines.hasNextLine()) waiting.add(lines.nextLine().split(" "));
            Runtime.getRuntime().halt(1);
        });
        reading.setDaemon(true);
        reading.start();
        KafkaConsumer<String, String> consumer = new KafkaConsumer<>(settings);
        consumer.subscribe(List.of(topic), new ConsumerRebalanceListener() {
            public void onPartitionsAssigned(Collection<TopicPartition> some) { say("assigned", numbers(consumer.assignment())); }
            public void onPartitionsRevoked(Collection<TopicPartition> some) {
                Set<TopicPartition> left = new HashSet<>(consumer.assignment());
                left.removeAll(some);
                say("assigned", numbers(left));
            }
            public void onPartitionsLost(Collection<TopicPartition> some) { say("lost", numbers(some)); }
        });
        while (true) {
            try {
                for (ConsumerRecord<String, String> each : consumer.poll(Duration.ofMillis(50)))
                    say("message", each.partition(), each.offset(), each.value());
            } catch (RuntimeException err) {
                say("error", err);
            }
            String[] words = waiting.poll();
            if (words == null) continue;
            try {
                if (words[0].equals("commit")) {
                    TopicPartition place = new TopicPartition(topic, Integer.parseInt(words[1]));
                    consumer.commitSync(Map.of(place, new OffsetAndMetadata(Long.parseLong(words[2]))));
                    say("done commit", words[2]);
                } else if (words[0].equals("committed")) {
                    TopicPartition place = new TopicPartition(topic, Integer.parseInt(words[1]));
                    OffsetAndMetadata found = consumer.committed(Set.of(place)).get(place);
                    say("done committed", found == null ? "none" : found.offset());
                } else if (words[0].equals("close")) {
                    consumer.close();
                    say("done close");
                    return;
                }
            } catch (RuntimeException err) {
                say("failed", words[0], err);
            }
        }
    }
}
